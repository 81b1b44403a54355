"""What tests of the command line share: terminals, a fake engine, reports, and hostile text."""
