"""`warmroute doctor`: looks at an engine or a whole fleet from outside, and says what is wrong and how to mend it."""
