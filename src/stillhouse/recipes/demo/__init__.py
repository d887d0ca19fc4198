"""A page in the browser: a model beside its student, and what it sees in a picture."""
