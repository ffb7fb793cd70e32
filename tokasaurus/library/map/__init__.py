"""`map`: answers for the rows of a data set, in files that appear while the job runs, or in the type that came in.

Knows where rows come from, how rows with answers are stored, and which of them are done. Does not know how a request is
made up or sent: `RequestFormat` and `BulkSession` do.
"""
