"""The HTTP gateway (extra `gateway`): what OpenAI's and TGI's clients speak, and routes of our own.

It has no model and no tokenizer: texts and messages travel as they are, and the workers read them.
"""
