"""What tests of several hosts share."""
