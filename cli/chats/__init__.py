"""Kept chats: who may write each, and the command that lists, renames and deletes them."""
