"""Process groups: meshes, their axes, and ranks that fail or differ."""
