"""A page in the browser that shows the engines at work. It asks nothing of other servers."""
