"""torch's communication hooks as transforms."""
