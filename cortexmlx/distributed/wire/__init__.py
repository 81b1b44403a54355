"""The messages between the controller and its workers, and their bytes."""
