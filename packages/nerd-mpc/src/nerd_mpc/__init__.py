"""nerd-mpc."""
