"""Saved chats: which process may write each, and the command that lists, renames and deletes them."""
