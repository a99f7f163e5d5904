"""flash_sample inside serving engines: one engine per file, no change to the engine's source."""
