"""What a service imports to push requests and read tokens."""
