"""The slash commands of a chat, by topic."""
