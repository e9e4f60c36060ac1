"""What an operator does to a queue, as functions: the command line and the live view call them."""
