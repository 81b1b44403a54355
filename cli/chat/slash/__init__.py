"""What the commands of a chat do, by what they are about."""
