"""Connections of slosched to other systems; each is imported when it is used."""
