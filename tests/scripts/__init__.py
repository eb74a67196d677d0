"""Programs that the tests start in processes of their own."""
