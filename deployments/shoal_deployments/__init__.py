"""Ray Serve shells around the actors."""
