"""Where the records of all rows of a table are: in host memory, on the device, or in a file."""
