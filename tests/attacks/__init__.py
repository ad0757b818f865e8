"""What can be read off an upload: attacks that succeed in the clear, and what is left of them."""
