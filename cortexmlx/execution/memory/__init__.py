"""The memory of a step: arena, tail and recurrent states, and transfers to and from the disk tier."""
