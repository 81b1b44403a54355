"""Both ends of links for tests, and strangers that knock."""
