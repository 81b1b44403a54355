"""Tools that a model may call, and its calls, as plain data; and Python functions as tools."""
