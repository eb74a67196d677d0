"""The interfaces of other libraries, over public names of flatbed."""
