"""The engine at work: its thread, requests and answers in and out, and the step that ties everything together."""
