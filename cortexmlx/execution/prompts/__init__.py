"""What is asked of prompts besides the next token: log-probabilities, sums of states, and logits."""
