"""Programs that the tests start in processes of their own, and programs to run by hand."""
