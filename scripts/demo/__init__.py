"""The demo model: what it is told, how it reads it, computes, learns and is stored."""
