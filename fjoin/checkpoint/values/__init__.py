"""What a rank has of a run, by name, and meetings of the ranks in a save or a load."""
