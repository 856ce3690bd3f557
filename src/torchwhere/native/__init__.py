"""The hot paths once more in C++, for jobs whose step waits for the CPU: built by the user, used by a watch where it is there."""
