"""nerd-coupling."""
