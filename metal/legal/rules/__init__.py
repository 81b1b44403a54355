"""What the syntax tree shows and the front end does not say: one module for each family of rules."""
