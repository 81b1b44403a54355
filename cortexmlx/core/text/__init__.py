"""From tokens to text: half characters, stop strings, thoughts apart from the answer."""
