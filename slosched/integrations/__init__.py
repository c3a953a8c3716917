"""Where slosched meets other systems; each is imported when it is used."""
