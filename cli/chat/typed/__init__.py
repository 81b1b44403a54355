"""What a person types into a chat: commands or messages, files in them, and what comes while an answer is written."""
