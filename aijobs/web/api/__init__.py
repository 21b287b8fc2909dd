"""The JSON APIs of users and operators."""
