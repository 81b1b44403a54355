"""The rules that the front end does not check and the syntax tree shows. Each module has one family of rules."""
