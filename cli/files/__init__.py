"""Files that commands read line by line, and files that they write and continue."""
