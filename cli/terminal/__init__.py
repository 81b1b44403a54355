"""What all commands share: output, progress, signals and exit codes."""
