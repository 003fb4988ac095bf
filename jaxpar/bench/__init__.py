"""What `jaxpar bench` runs."""
