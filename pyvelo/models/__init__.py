"""Models before they are loaded: names, downloads, and the scan and checks of GGUF files."""
