"""Engines of which a part is made up."""
