"""Messages between the ranks of one host through shared memory."""
