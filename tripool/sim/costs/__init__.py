"""What steps and transfers cost on hardware that is described, not present."""
