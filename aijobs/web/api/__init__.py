"""The JSON API: the user's and the operators'."""
