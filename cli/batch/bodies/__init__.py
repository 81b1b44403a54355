"""The bodies of a batch's requests and answers: what is asked for, and the shape in which it comes back."""
