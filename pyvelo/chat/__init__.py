"""Chats: messages, templates and the sandbox they run in, conversations."""
