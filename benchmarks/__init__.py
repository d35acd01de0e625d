"""What the README's figures come from, one command each."""
