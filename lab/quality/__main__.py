from lab.quality.command import main

main()
