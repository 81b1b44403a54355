"""Images in prompts: opening, preparing and encoding them, and where they are among a prompt's tokens."""
