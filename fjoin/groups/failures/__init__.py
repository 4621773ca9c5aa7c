"""How ranks meet in the store, report failures and detect those of others."""
