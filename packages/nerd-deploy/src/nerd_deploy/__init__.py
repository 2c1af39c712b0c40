"""nerd-deploy."""
