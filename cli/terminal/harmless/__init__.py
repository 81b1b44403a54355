"""What keeps a terminal from obeying text that others wrote: models, files, folders, servers."""
