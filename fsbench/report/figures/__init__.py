"""Every figure of `fsbench plot`, `report`, `e2e` and `hotvocab`."""
